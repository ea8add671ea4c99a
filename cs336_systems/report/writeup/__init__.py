"""The answers to the assignment's problems as one document, made of measured rows."""
