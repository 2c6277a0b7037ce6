"""Stages of uploads that compress them, for `local.upload`."""
