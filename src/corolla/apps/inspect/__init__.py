"""What a model is and takes, told before any of it is downloaded."""
