"""Schedules in Django: those of the settings and of ``@schedule``, and the duty by which workers write their ticks."""
