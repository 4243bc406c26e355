"""What a finished step is measured by; nothing here decides what is sampled or trained."""
