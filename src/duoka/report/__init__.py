"""Output for people and tools: terminal, SARIF, exports.

- `terminal`: plans, explanations, comparisons and checks, printed
- `export`: a plan in the syntax of other tools
- `live`: the current memory of running processes
- `measured`: measured memory and speed, beside the forecast
- `check_report`, `sarif`: the result of a check, as data and for code hosts
"""
