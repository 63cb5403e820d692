"""The engine on the host: scheduler, pages, requests."""
