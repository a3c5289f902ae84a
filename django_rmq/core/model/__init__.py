"""The values that all other packages use: topics, messages, answers, key names, bounds."""
