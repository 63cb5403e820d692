"""Commands that measure jflex; the README's figures come from their result files."""
