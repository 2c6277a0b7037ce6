"""From trained parameters to the sum that is sent to the server."""
