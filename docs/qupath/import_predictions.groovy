// Brings the regions that `gigagrad predict` wrote into QuPath: into every image of the open project that has a file
// DIR/geojson/STEM.geojson, or, without a project, into the image that is open.
//
// Automate > Script editor, open this file, name the folder below, Run; or from a command line:
//     QuPath script import_predictions.groovy --project=slides.qpproj --args=/data/predictions
import qupath.lib.io.PathIO

def folder = args ? args[0] : '/data/predictions'  // what was `--out`

// What was predicted of the slide in this file, nothing where there is no prediction. Results are called by their
// slides, without the suffixes .ome and .cog.
def predicted = { uri ->
    def stem = new File(uri.path).name.replaceFirst(/\.[^.]*$/, '').replaceFirst(/\.(ome|cog)$/, '')
    def regions = new File(folder, "geojson/${stem}.geojson")
    regions.exists() ? PathIO.readObjects(regions) : []
}

// Regions keep their ids: those of an earlier import are replaced, and all other objects stay.
def bring = { imageData ->
    def regions = imageData.getServer().getURIs().collectMany(predicted)
    def ids = regions*.getID() as Set
    def hierarchy = imageData.getHierarchy()
    hierarchy.removeObjects(hierarchy.getAllObjects(false).findAll { it.getID() in ids }, true)
    hierarchy.addObjects(regions)
    println "${imageData.getServer().getMetadata().getName()}: ${regions.size()} regions"
}

if (getProject() == null)
    bring(getCurrentImageData())
else for (entry in getProject().getImageList()) {
    // The open image lives in the viewer; the others are opened one after the other.
    def imageData = entry == getProjectEntry() ? getCurrentImageData() : entry.readImageData()
    bring(imageData)
    entry.saveImageData(imageData)
}
