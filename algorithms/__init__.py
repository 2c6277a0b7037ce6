"""The methods, one file for each paper. Importing a file enters its rules and algorithms into the registry."""
