"""Base: units, files, JSON and text: what every district uses, and what knows nothing of models."""
