"""What was written for earlier releases and has to go on working, unchanged."""
