"""The probe: which operation of a step made the first number that is not finite, and what can help."""
