"""Tables and plots out of rows and of runs' own files. Reads only what was measured; types no number."""
