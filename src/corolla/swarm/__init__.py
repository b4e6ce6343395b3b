"""Who serves what, and which way is best: announcements, views, costs, routes. No torch, and mostly pure."""
