"""Widgets over the views of `views`, with buttons and filters; the executed notebook keeps the static form."""
