"""The page that a person looks at: templates, a style sheet, modules of JavaScript, and the routes to them."""
