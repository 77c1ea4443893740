"""What was asked and what is answered: prompts, requests, text, streams."""
