"""Data sets that users give: functions, files and objects of Python."""
