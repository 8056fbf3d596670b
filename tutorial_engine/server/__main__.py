"""``python -m tutorial_engine.server [MODEL]``: the command `tutorial-engine`, for where it is not on the PATH. Without
the name of a sub-command it serves."""

import sys

from tutorial_engine.server.cli import COMMANDS, main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(arguments if arguments[:1] and arguments[0] in COMMANDS else ["serve", *arguments])
