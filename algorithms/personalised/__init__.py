"""Personalised methods: clients have models, or parts of them, of their own."""
