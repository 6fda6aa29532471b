"""From the models to the schemas of the CustomResourceDefinitions."""
