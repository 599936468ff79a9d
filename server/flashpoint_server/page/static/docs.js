// /docs: Swagger UI, served only from this server.

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  syntaxHighlight: false, // it needs inline styles, which the page's policy forbids
  validatorUrl: null, // nothing is sent to another host
});
