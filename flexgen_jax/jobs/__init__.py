"""Jobs: a file of requests in, a file of results out, over hours and interruptions."""
