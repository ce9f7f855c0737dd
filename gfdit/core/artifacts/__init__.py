"""What artifacts consist of, and which transfers bring one from layout to layout."""
