"""What is asked, and what is known of an answer: the terms that all other rooms use. No hardware, no choice."""
