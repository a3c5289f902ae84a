"""A bank whose transfers are messages: its workers and its sender are killed, and every balance has to be right."""
