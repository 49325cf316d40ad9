"""Checker: a model's own code, run on a placement's virtual GPUs before a GPU is touched.

`prove` asks whether a plan runs and fits, and stops at the first thing that doesn't.
`run.check_subject` goes on after each fault, so that one run reports them all, with the lines of
code that they stand in.
"""
