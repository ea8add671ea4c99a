"""Tables, plots and documents from measured rows and from run folders. No number is typed by hand."""
