"""Price and availability logs of AWS, Google Cloud and Azure, read within limits."""
