"""The machine around a run: its devices, its files and its console."""
