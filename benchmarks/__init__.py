"""Figures, each as a ratio against the bare limit measured in the same run."""
