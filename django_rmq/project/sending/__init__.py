"""`send_message` and its kin, in step with database transactions."""
