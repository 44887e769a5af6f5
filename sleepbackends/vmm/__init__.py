"""What backends over a device's virtual memory share above the driver."""
