"""An app whose listener hangs, and the settings of a shop that has it."""
