// /docs: Swagger UI, from this server alone.

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  syntaxHighlight: false, // it would style each word by itself, which the page's policy does not let it
  validatorUrl: null, // nothing is sent to another host
});
