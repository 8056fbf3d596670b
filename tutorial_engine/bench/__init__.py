"""Load and measurement: ``tutorial-engine bench serve|throughput|latency``, with vLLM's flags and words.

    workload.py   when requests come, and what is in them                  (seeded: the same ones on every machine)
        |
    client.py     sends them to a server, notes when each token arrived    (bench serve)
    offline.py    gives them to an engine in this process                  (bench throughput, bench latency)
        |
    report.py     TTFT, TPOT, ITL, goodput: a table, JSON, a picture of a sweep

`bench serve` is an open loop: a request is sent when its time has come, whether or not the earlier ones are answered.
A server that is too slow then shows it, in a queue that grows. In a closed loop, as `--max-concurrency` makes it, the
clients wait for each other and the server is never asked for more than it can do.
"""
