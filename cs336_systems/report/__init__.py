"""Tables and plots from rows and from runs' own files. Reads only what was measured; types no number."""
