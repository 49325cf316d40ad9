"""Report: what people and tools read: pages, tables, SARIF, exports."""
