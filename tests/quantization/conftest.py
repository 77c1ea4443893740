"""TEMPORARY"""
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
import stand_ins
stand_ins.install()
