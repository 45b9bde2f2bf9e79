"""Opt levels: a float32 model and its optimizer as a mixed-precision pair."""
