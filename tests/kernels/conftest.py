"""These run each kernel in Triton's interpreter, on the CPU: `TRITON_INTERPRET=1 pytest tests/kernels`.

Triton reads the variable when it is imported, and a transformers model imports Triton; so they have a process of their
own, and are left out of any other. What they prove is the numbers; that a kernel compiles, and fits a T4, is for
`tests/kernels_compile`.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
