"""The form in which the stores of the registry keep nodes."""
