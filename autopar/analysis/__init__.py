"""What ops do, whatever the machine: flops and bytes."""
