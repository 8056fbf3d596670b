"""What the exercises expect: one module for each source under `solutions/`, with the same name.

A module holds the course's own answers, which stand in for a learner's until those pass, and a check for each. The
words of an exercise, its hints and its known wrong answers are in the source.

Owns: expectations. Does not own: how a check calls and compares (`checks.py`).
"""
