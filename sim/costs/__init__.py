"""Times and sizes of models on kinds of hardware: the tables that come with gfdit, and how they were derived."""
