"""Questions and answers: problems, formats, launches and trials, in the terms of all other rooms. No hardware."""
