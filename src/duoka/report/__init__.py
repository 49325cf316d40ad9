"""Output for people and tools: terminal, HTML, SARIF, exports.

- `terminal`: plans, explanations, comparisons and checks, printed
- `html`: a plan as one HTML page
- `export`: a plan in the syntax of other tools
- `live`: the current memory of running processes
- `measured`: measured memory and speed, beside the forecast
- `picture`: figures, if matplotlib is installed
- `check_report`, `sarif`: the result of a check, as data and for code hosts
"""
