"""Callbacks for Lightning's Trainer."""
