"""The server's web page at `/`: templates, a style sheet, modules of JavaScript, and the routes to them."""
