"""The prefix cache: pages shared by requests that begin alike."""
