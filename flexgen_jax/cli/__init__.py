"""The command line: `main` has the commands, the other modules what they share and print."""
