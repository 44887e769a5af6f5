"""The promises of the contract, one module each, as pytest mix-ins."""
