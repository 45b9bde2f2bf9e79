"""The record of a run: one JSON object a step, with a header that says which rule made it."""
