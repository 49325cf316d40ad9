"""Output for people and tools: terminal, HTML, SARIF, exports.

- `terminal`: plans, explanations, comparisons and checks, printed
- `html`: a plan as one page
- `export`: a plan in the words of other tools
- `live`: what processes say of their memory while they run
- `measured`: what loading and answering took, beside the forecast
- `picture`: figures, where matplotlib is installed
- `check_report`, `sarif`: what a check found, as data and for code hosts
"""
